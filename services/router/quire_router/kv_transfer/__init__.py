"""How a sequence's KV pages travel between engines: tickets, leases, hand-offs and exports."""
