"""Child processes of a service, each of which does one job at a time, and harms nothing but that job."""
