"""Formats of files with samples, a file each: what a block of it is, and how its samples are
read.

`lockstep.data.shard_readers` says what a reader of a format is, and lists the formats with the
names of files that have them: a new format is a file here and an entry there.
"""
