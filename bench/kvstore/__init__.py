"""The kvstore's tiers and transports, beside what memory, sockets and disks do by themselves."""
