"""Engines that run units of work: threads, a cache, Ray."""
