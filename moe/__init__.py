"""Mixture-of-experts layers hosted by other peers. Empty until its issue: see the roadmap in the README."""
