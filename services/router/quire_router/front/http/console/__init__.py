"""The console: a static page, a stream of snapshots, and actions of an operator. See docs/console.md."""
