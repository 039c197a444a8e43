"""Flat tensors: their layout, the slots of parameters, views of slots, and copies of gradients into them.

Imported by everything that handles gradients. Imports the step guard, settings and errors. No communication.
"""
