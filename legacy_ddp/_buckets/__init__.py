"""Flat tensors: their layout, the slots of parameters, views of slots, and copies of gradients into slots.

Imported by every room that handles gradients. Imports the step guard, torch's interfaces, settings and
errors. No communication.
"""
