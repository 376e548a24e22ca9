"""Finds out which operations all ranks have asked for, in whichever order, and carries them out."""
