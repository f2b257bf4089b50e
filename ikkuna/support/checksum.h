// The masked CRC-32C of TFRecords, with the processor's instruction where it has one.

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace {

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t checksum_of_words(uint32_t c, const uint8_t *data, int64_t size) {
    uint64_t wide = c, word;
    for (; size >= 8; size -= 8, data += 8) {
        std::memcpy(&word, data, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    return static_cast<uint32_t>(wide);
}
const bool has_instruction = __builtin_cpu_supports("sse4.2");
#endif

struct Checksum {
    uint32_t table[8][256];
    Checksum() {
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t c = i;
            for (int bit = 0; bit < 8; ++bit) c = c & 1 ? c >> 1 ^ 0x82F63B78u : c >> 1;
            table[0][i] = c;
        }
        for (int k = 1; k < 8; ++k)
            for (int i = 0; i < 256; ++i) table[k][i] = table[0][table[k - 1][i] & 255] ^ table[k - 1][i] >> 8;
    }
    uint32_t masked(const uint8_t *data, int64_t size) const {
        uint32_t c = 0xFFFFFFFFu;
#if defined(__x86_64__)
        if (has_instruction) {
            c = checksum_of_words(c, data, size);
            data += size & ~int64_t(7), size &= 7;
        }
#endif
        for (; size >= 8; size -= 8, data += 8) {
            uint32_t low = (data[0] | data[1] << 8 | data[2] << 16 | static_cast<uint32_t>(data[3]) << 24) ^ c;
            c = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
                table[3][data[4]] ^ table[2][data[5]] ^ table[1][data[6]] ^ table[0][data[7]];
        }
        for (; size > 0; --size, ++data) c = table[0][(c ^ *data) & 255] ^ c >> 8;
        c ^= 0xFFFFFFFFu;
        return (c >> 15 | c << 17) + 0xA282EAD8u;
    }
};
const Checksum checksum;

}  // namespace
