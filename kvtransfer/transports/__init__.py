"""How bytes move over a link. Two narrow protocols, one implementation of each for each transport."""
