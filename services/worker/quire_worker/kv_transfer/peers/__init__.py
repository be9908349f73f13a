"""Pages from one worker to another: exports, which peers come for, and pulls, which go for them."""
