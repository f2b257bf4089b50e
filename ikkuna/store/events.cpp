// Reads TensorBoard's event files: TFRecords, each with an Event in the wire format of Protocol Buffers.
//
// Scalars go into columns.  Every other value of a summary goes into a list of places in the file, to be read when it is needed.
// PythonScanner of event_reader.py does the same and defines the meaning of every case.

#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

// The masked CRC-32C of TFRecords, with the processor's instruction where it has one.
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

namespace {

template <class T> T load(const uint8_t *data) {  // the format is little-endian, as are all supported processors
    T value;
    std::memcpy(&value, data, sizeof value);
    return value;
}

// The fields of a message, one after the other; `is_valid` is false after a malformed one.
struct Fields {
    const uint8_t *at, *end;
    uint64_t number = 0, scalar = 0;
    int type = 0;
    const uint8_t *data = nullptr;
    int64_t size = 0;
    bool is_valid = true;

    Fields(const uint8_t *data, int64_t size) : at(data), end(data + size) {}

    bool varint(uint64_t &value) {
        value = 0;
        for (int shift = 0; shift < 70; shift += 7) {
            if (at == end) return false;
            uint64_t byte = *at++;
            if (shift < 64) value |= (byte & 127) << shift;
            if (byte < 128) return true;
        }
        return false;
    }
    bool next() {
        if (at == end) return false;
        uint64_t key, length;
        if (!varint(key)) return is_valid = false;
        number = key >> 3;
        type = key & 7;
        if (type == 0) return varint(scalar) || (is_valid = false);
        if (type == 2) {
            if (!varint(length) || length > static_cast<uint64_t>(end - at)) return is_valid = false;
            size = static_cast<int64_t>(length);
        } else if (type == 1 || type == 5) {
            size = type == 1 ? 8 : 4;
            if (end - at < size) return is_valid = false;
        } else {
            return is_valid = false;
        }
        data = at;
        at += size;
        return true;
    }
};

// The scalars of a tag: the number of the event of each, and their values.
struct Scalars {
    std::vector<int32_t> event;
    std::vector<float> value;
};

struct Scanner {
    // events
    std::vector<int64_t> step;
    std::vector<double> time;
    // scalars: of each tag, and of the event that is being read
    std::vector<Scalars> scalars;
    std::vector<std::pair<int32_t, float>> found;
    // other values: tag, event, field number, place and size of the Summary.Value
    std::vector<int64_t> other;
    // starts of sessions: step, number of events before, number of other values before
    std::vector<int64_t> start;
    // tags
    std::unordered_map<std::string, int32_t> ids;
    std::string names;
    std::vector<int64_t> ends;    // of each tag in `names`
    std::vector<int32_t> after;   // the tag that followed this one the last time, for a cheap guess
    std::string wanted;
    int32_t latest = -1;
    int64_t lost = 0, budget = 0, count = 0;

    int32_t id_of(const uint8_t *data, int64_t size) {
        if (latest >= 0) {
            int32_t guess = after[latest];
            if (guess >= 0) {
                int64_t begin = guess ? ends[guess - 1] : 0;
                if (ends[guess] - begin == size && !std::memcmp(names.data() + begin, data, size)) return latest = guess;
            }
        }
        wanted.assign(reinterpret_cast<const char *>(data), size);
        auto found = ids.find(wanted);
        int32_t id;
        if (found != ids.end()) {
            id = found->second;
        } else {
            id = static_cast<int32_t>(ends.size());
            ids.emplace(wanted, id);
            names += wanted;
            ends.push_back(static_cast<int64_t>(names.size()));
            after.push_back(-1);
            scalars.emplace_back();
        }
        if (latest >= 0) after[latest] = id;
        return latest = id;
    }

    bool read_value(const uint8_t *data, int64_t size, int64_t place) {
        Fields fields(data, size);
        const uint8_t *name = data;
        int64_t name_size = 0, kind = 0;
        float number = 0;
        while (fields.next()) {
            if (fields.number == 1 && fields.type == 2) {
                name = fields.data;
                name_size = fields.size;
            } else if (fields.number == 2 && fields.type == 5) {
                number = load<float>(fields.data);
                kind = 2;
            } else if (fields.type == 2 && ((fields.number >= 3 && fields.number <= 6) || fields.number == 8)) {
                kind = static_cast<int64_t>(fields.number);
            }
        }
        if (!fields.is_valid) return false;
        if (!kind) return true;
        int32_t id = id_of(name, name_size);
        if (kind == 2) {
            found.emplace_back(id, number);
        } else {
            other.insert(other.end(), {id, static_cast<int64_t>(step.size()), kind, place, size});
        }
        return true;
    }

    bool read_event(const uint8_t *data, int64_t size, int64_t place) {
        size_t others = other.size();
        found.clear();
        int64_t own_step = 0;
        double own_time = 0;
        bool starts = false, is_valid = true;
        Fields fields(data, size);
        while (is_valid && fields.next()) {
            if (fields.number == 1 && fields.type == 1) {
                own_time = load<double>(fields.data);
            } else if (fields.number == 2 && fields.type == 0) {
                own_step = static_cast<int64_t>(fields.scalar);
            } else if (fields.number == 7 && fields.type == 2) {
                Fields session(fields.data, fields.size);
                while (session.next()) starts |= session.number == 1 && session.type == 0 && session.scalar == 1;
                is_valid = session.is_valid;
            } else if (fields.number == 5 && fields.type == 2) {
                Fields summary(fields.data, fields.size);
                while (is_valid && summary.next())
                    if (summary.number == 1 && summary.type == 2)
                        is_valid = read_value(summary.data, summary.size, place + (summary.data - data));
                is_valid = is_valid && summary.is_valid;
            }
        }
        if (!is_valid || !fields.is_valid) {
            other.resize(others);
            return false;
        }
        if (starts)
            start.insert(start.end(), {own_step, static_cast<int64_t>(step.size()), static_cast<int64_t>(others / 5)});
        int32_t now = static_cast<int32_t>(step.size());
        for (auto [tag, number] : found) {
            scalars[tag].event.push_back(now);
            scalars[tag].value.push_back(number);
        }
        count += static_cast<int64_t>(found.size());
        if (!found.empty() || other.size() > others) {
            step.push_back(own_step);
            time.push_back(own_time);
        }
        return true;
    }

    // Return the position of the next length with a correct checksum.
    static int64_t next_head(const uint8_t *data, int64_t size, int64_t at) {
        for (; at + 12 <= size; ++at)
            if (!load<uint32_t>(data + at + 4) && load<uint32_t>(data + at) &&
                checksum.masked(data + at, 8) == load<uint32_t>(data + at + 8))
                return at;
        return -1;
    }

    int64_t scan(const uint8_t *data, int64_t size, int64_t place, bool is_end) {
        int64_t at = 0, done = 0;  // everything before `done` has been read or is lost
        int64_t waiting = -1;      // an incomplete record, after which nothing has been read
        budget += 16 * size;
        while ((at = next_head(data, size, at)) >= 0) {
            int64_t end = at + 16 + static_cast<int64_t>(load<uint32_t>(data + at));
            if (end > size) {
                if (!is_end) break;
                if (waiting < 0) waiting = at;
            } else if (end - at <= budget) {
                if (checksum.masked(data + at + 12, end - at - 16) == load<uint32_t>(data + end - 4)) {
                    lost += at - done;
                    if (!read_event(data + at + 12, end - at - 16, place + at + 12)) lost += end - at;
                    at = done = end;
                    waiting = -1;
                    continue;
                }
                budget -= end - at;
            }
            ++at;
        }
        if (waiting >= 0 && is_end) at = waiting;
        if (at < 0) at = size < 12 ? done : size - 11 > done ? size - 11 : done;  // a length may begin here
        lost += at - done;
        return at;
    }
};

template <class T> void copy(const std::vector<T> &from, void *to) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size() * sizeof(T));
}

}  // namespace

extern "C" {

uint32_t events_checksum(const uint8_t *data, int64_t size) { return checksum.masked(data, size); }
void *events_open() {
    try {
        return new Scanner;
    } catch (...) {
        return nullptr;
    }
}
void events_close(void *scanner) { delete static_cast<Scanner *>(scanner); }

// Read the records of `data`, which begins at `place` of the file, and return how many bytes are done with; -1 without memory.
int64_t events_scan(void *scanner, const uint8_t *data, int64_t size, int64_t place, int is_end) {
    try {
        return static_cast<Scanner *>(scanner)->scan(data, size, place, is_end);
    } catch (...) {
        return -1;
    }
}

// The numbers of events, scalars, other values, starts, tags, bytes of tags, and lost bytes.
void events_sizes(void *scanner, int64_t *out) {
    const Scanner &s = *static_cast<Scanner *>(scanner);
    out[0] = static_cast<int64_t>(s.step.size());
    out[1] = s.count;
    out[2] = static_cast<int64_t>(s.other.size() / 5);
    out[3] = static_cast<int64_t>(s.start.size() / 3);
    out[4] = static_cast<int64_t>(s.ends.size());
    out[5] = static_cast<int64_t>(s.names.size());
    out[6] = s.lost;
}

// Copy everything; scalars are grouped by their tags, and `bounds` has for each tag the number of scalars before its own.
void events_copy(void *scanner, void *step, void *time, int64_t *bounds, int32_t *event, float *value, void *other,
                 void *start, void *ends, void *names) {
    const Scanner &s = *static_cast<Scanner *>(scanner);
    copy(s.step, step);
    copy(s.time, time);
    int64_t before = 0;
    for (const Scalars &each : s.scalars) {
        *bounds++ = before;
        copy(each.event, event + before);
        copy(each.value, value + before);
        before += static_cast<int64_t>(each.value.size());
    }
    *bounds = before;
    copy(s.other, other);
    copy(s.start, start);
    copy(s.ends, ends);
    std::memcpy(names, s.names.data(), s.names.size());
}
}
