"""Input of a command beside its options: prompts, environment variables and a settings file."""
