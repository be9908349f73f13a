"""`python -m quire_worker.profile`: shows where a step's time goes, kernel by kernel, compared with what the hardware
allows."""
