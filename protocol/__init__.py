"""Everything two octavo processes must agree on. Imports only the standard library, msgspec and zmq.

The rules of the wire:

1. A message is a `msgspec.Struct` with `array_like=True, gc=False` and a `tag`; a channel carries one
   union of such types. Nothing is ever pickled.
2. A message is one frame: a byte that names the union (`codec.Kind`), then a msgpack body. Only large binary values
   (`Buffer`, `IdArray`) follow in frames of their own.
3. Fields of an `array_like` struct are positions: a field is never reordered or removed; a new field goes last
   and has a default. Any change of the bytes increments `PROTOCOL_VERSION` if a release has used the current version
   (tests/golden/wire.json).
4. Versions are compared when two processes meet (`Connect`, `Hello`), and a mismatch is rejected with
   both numbers in the message.
5. A frame that does not decode is counted, logged and dropped; it never ends a thread.
"""

PROTOCOL_VERSION = 5
