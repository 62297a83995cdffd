"""Values and small tools that everything else is built on: identifiers, identity, clock, devices, errors."""
