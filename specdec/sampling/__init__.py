"""From a row of logits to the target's choice."""
