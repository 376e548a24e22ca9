"""Compares the first steps of a user's script at several numbers of workers: records of steps, and
what differs.
"""
