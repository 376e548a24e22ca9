"""Formats of files with samples, a file each: what a block of it is, and how its samples are
read.
"""
