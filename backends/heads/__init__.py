"""Draft heads: small models that take the target's hidden states, embedding and output head."""
