"""Other hosts: how `lockstep run -H` starts a launcher on each over ssh, and how that one sees it.

The starter (`ssh`) gives each launcher its command line and environment (`remote_command`), shows
its output and forwards signals. There, `starter` is the other end of that connection, and
`host_description` tells what the host can run, which must be the same on all.
"""
