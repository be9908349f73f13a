"""This package compiles the structure that an answer must match (a JSON schema, a regular expression, tools, ...) to a
grammar for workers."""
