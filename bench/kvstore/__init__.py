"""Benchmarks of the kvstore's tiers and transports, compared with plain memory, sockets and disks."""
