"""Grammar-constrained decoding: tokens allowed by a JSON schema, a regex or a grammar."""
