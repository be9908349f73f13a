"""From what an answer must match (a schema, a regular expression, tools, ...) to the grammar that engines take."""
