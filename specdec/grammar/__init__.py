"""Which tokens may follow, where a text has to keep to a schema, an expression or a grammar."""
