"""How many processor cores this worker may use, and how its threads share them with neighbours."""
