"""`python -m quire_worker.profile`: where a step's time goes, kernel by kernel, against what the hardware could do."""
