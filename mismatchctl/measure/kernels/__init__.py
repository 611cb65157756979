"""The arithmetic over tokens, three times behind one interface: in numpy, compiled, on a device."""
