// Moves the parts of one step between nodes. Both directions progress at once, or two nodes that send more than the
// sockets buffer would wait for each other.
#include "native/node_links.h"

#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

namespace octavo {
namespace {

// One direction of one connection.
struct Transfer {
    int socket;
    short event;  // POLLIN or POLLOUT
    char* data;
    int64_t num_left;

    // Moves what can be moved without waiting; false if the connection has ended.
    bool advance() {
        while (num_left > 0) {
            const ssize_t moved = event == POLLOUT ? send(socket, data, num_left, MSG_DONTWAIT | MSG_NOSIGNAL)
                                                   : recv(socket, data, num_left, MSG_DONTWAIT);
            if (moved > 0) {
                data += moved;
                num_left -= moved;
            } else if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
                return true;
            } else if (moved == 0 || errno != EINTR) {
                return false;
            }
        }
        return true;
    }
};

[[noreturn]] void wait_for_the_end() {
    for (;;) pause();
}

void move_all(std::vector<Transfer>& transfers) {
    std::vector<pollfd> waiting;
    for (;;) {
        waiting.clear();
        for (Transfer& transfer : transfers) {
            if (!transfer.advance()) wait_for_the_end();
            if (transfer.num_left > 0) waiting.push_back({transfer.socket, transfer.event, 0});
        }
        if (waiting.empty()) return;
        poll(waiting.data(), waiting.size(), -1);
    }
}

// The bytes of one node's parts: where they begin in each piece, and how many there are.
struct Span {
    int64_t begin, size;
};

}  // namespace

void NodeLinks::exchange(char* area, const Parts& parts, int64_t num_ranks) const {
    const auto span_of = [&](int64_t other) {
        const int64_t begin = parts.width * first_ranks[other] / num_ranks * parts.item_bytes;
        const int64_t end = parts.width * first_ranks[other + 1] / num_ranks * parts.item_bytes;
        return Span{begin, end - begin};
    };
    // Several pieces travel as one message, packed.
    std::vector<std::vector<char>> packed(num_nodes);
    const auto message_of = [&](int64_t other) {
        const Span span = span_of(other);
        if (parts.count == 1) return area + span.begin;
        packed[other].resize(parts.count * span.size);
        return packed[other].data();
    };
    const auto each_piece = [&](int64_t other, auto copy) {
        const Span span = span_of(other);
        for (int64_t piece = 0; parts.count > 1 && piece < parts.count; ++piece)
            copy(packed[other].data() + piece * span.size, area + piece * parts.stride + span.begin, span.size);
    };
    char* own = message_of(node);
    each_piece(node, [](char* message, const char* piece, int64_t size) { std::memcpy(message, piece, size); });
    std::vector<Transfer> transfers;
    for (int64_t other = 0; other < num_nodes; ++other) {
        if (other == node) continue;
        transfers.push_back({sockets[other], POLLOUT, own, parts.count * span_of(node).size});
        transfers.push_back({sockets[other], POLLIN, message_of(other), parts.count * span_of(other).size});
    }
    move_all(transfers);
    for (int64_t other = 0; other < num_nodes; ++other)
        if (other != node)
            each_piece(other, [](const char* message, char* piece, int64_t size) { std::memcpy(piece, message, size); });
}

}  // namespace octavo
