"""Each kernel of a step against its floor."""
