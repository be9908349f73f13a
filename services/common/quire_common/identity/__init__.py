"""The certificates of services: the files of each, the names under which servers are verified, and the callers that
each RPC accepts."""
