"""specdec beside other programs, with the same weights, prompts and limits."""
