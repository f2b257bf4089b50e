import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.record_writer import masked_crc32c as reference

from ikkuna.store.event_records import crc_of_bytes, masked_crc32c

CHECKSUMS = [masked_crc32c, crc_of_bytes]  # the first one is native where that is possible


@given(st.binary(max_size=3000))
def test_the_checksum_is_that_of_tensorboardx(data):
    assert {checksum(data) for checksum in CHECKSUMS} == {reference(data)}


@pytest.mark.parametrize("length", [0, 3, 4, 63, 64, 511, 512, 513, 1023, 1024, 1025, 5000])
def test_the_checksum_is_right_at_the_ends_of_chunks(length):
    data = bytes(i * 37 % 256 for i in range(length))
    assert {checksum(data) for checksum in CHECKSUMS} == {reference(data)}
