"""Compares the first steps of a user's script, or of a training from options, at several numbers of
workers: records of steps, and what differs.
"""
