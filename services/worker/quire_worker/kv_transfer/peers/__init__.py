"""Pages from one worker to another. An export offers pages to peers (other workers); a pull fetches them from a
peer."""
