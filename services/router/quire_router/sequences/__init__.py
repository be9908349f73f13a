"""The life of a sequence, as records with one writer each. This module knows neither streams nor formats."""
