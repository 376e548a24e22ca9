"""What every transport needs: operation queues, `Work`, back-off, checks of tensors, reduce ops,
host identity.
"""
