"""The core of a replica makes all scheduling decisions. It is pure and synchronous: requests and Reports go in, Grants
and outputs come out."""
