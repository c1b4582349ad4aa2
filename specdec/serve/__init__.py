"""`specdec serve`: an LLM behind the HTTP interface that OpenAI's clients speak."""
