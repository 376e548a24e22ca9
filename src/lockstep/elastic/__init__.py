"""Workers that are lost, leave and join while a job runs: the membership, and each side of it."""
