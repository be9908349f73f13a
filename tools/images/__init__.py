"""Container images: what goes into them, how they are built, and whether they run (`make images`)."""
