"""Flat tensors: their layout, the slots of parameters, views of slots, and copies of gradients into slots.

Nothing in this folder communicates.
"""
