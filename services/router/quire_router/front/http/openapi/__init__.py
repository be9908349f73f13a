"""What the HTTP interface says of itself: an OpenAPI document of the tables that parse, and a page that shows it."""
