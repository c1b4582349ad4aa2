"""What a command is given beside its options: prompts, variables and a file of settings."""
