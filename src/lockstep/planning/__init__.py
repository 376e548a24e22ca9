"""Predicts whether more workers pay: a profile of the user's script, a network, and a simulation of
the step.
"""
