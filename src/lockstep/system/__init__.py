"""Services of the operating system: processes, files, private folders, heartbeats between hosts,
patches of torch.
"""
