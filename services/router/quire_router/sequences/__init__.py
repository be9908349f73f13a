"""The life of a sequence, as records with one writer each. Knows neither streams nor formats."""
