"""The OpenAPI document of the HTTP interface, made from the tables that parse requests, and a page that shows it."""
