"""Training of drafts on a user's text: distillation from the target's distributions."""
