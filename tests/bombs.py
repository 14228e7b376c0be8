"""Files made to hurt a decoder: small ones that unpack to much, lies in headers, nests, playlists.

`BOMBS` names them all. Each is made in a second or less, by repeating packets and patching bytes.
"""

import io
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from string import ascii_letters, digits
from typing import Any

import av
import numpy as np

from tests.songs import FORMATS, as_frame, encode, id3_frame, id3_tag, melody, wav_header

MAX_UPLOAD_BYTES = 25_000_000  # as large as the large ones are
ANSWERED = ""  # in place of an error's code


@dataclass(frozen=True)
class Bomb:
    """A hostile file, and the code of the error that it gets: `ANSWERED` where it is legal.

    `seconds` is the true duration of one that is answered.
    """

    make: Callable[[], bytes]
    code: str = ANSWERED
    seconds: float | None = None


@cache
def song_file(name: str, seconds: float = 2.0) -> bytes:
    """An honest file of a format of tests/songs.py."""
    return encode(melody(seconds, FORMATS[name].rate), name)


def repeated(piece: bytes, num_bytes: int = MAX_UPLOAD_BYTES) -> bytes:
    return piece * (num_bytes // len(piece))


def patched(data: bytes, marker: bytes, offset: int, new: bytes) -> bytes:
    """`new` at so many bytes behind the start of the marker, which must be there."""
    at = data.index(marker) + offset
    return data[:at] + new + data[at + len(new) :]


# Hours in a few bytes


def flac_header(
    rate: int = 44_100,
    num_channels: int = 2,
    num_samples: int = 0,
    blocks: Iterable[tuple[int, bytes]] = (),
) -> bytes:
    """A FLAC file's start (RFC 9639, section 8), with further metadata blocks of (type, body)."""
    shape = rate << 44 | (num_channels - 1) << 41 | 15 << 36 | num_samples
    body = struct.pack(">HH", 65_535, 65_535) + bytes(6) + shape.to_bytes(8, "big")
    written = [(0, body + bytes(16)), *blocks]
    last = len(written) - 1
    return b"fLaC" + b"".join(
        bytes([kind | (0x80 if index == last else 0)]) + len(block).to_bytes(3, "big") + block
        for index, (kind, block) in enumerate(written)
    )


def flac_silence(num_channels: int = 2) -> bytes:
    """A FLAC frame of 65,535 samples, each channel constant: some 15 bytes."""
    head = b"\xff\xf8\x70" + bytes([(num_channels - 1) << 4 | 8, 0]) + b"\xff\xfe"
    body = head + bytes([crc(head, 8, 0x07)]) + bytes(3) * num_channels
    return body + crc(body, 16, 0x8005).to_bytes(2, "big")


def crc(data: bytes, num_bits: int, polynomial: int) -> int:
    """A plain CRC, most significant bit first, that starts at 0."""
    value, top, mask = 0, 1 << (num_bits - 1), (1 << num_bits) - 1
    for byte in data:
        value ^= byte << (num_bits - 8)
        for _ in range(8):
            value = (value << 1 ^ (polynomial if value & top else 0)) & mask
    return value


def flac_of_months() -> bytes:
    return flac_header() + repeated(flac_silence())


def flac_of_59_minutes_of_eight_channels_at_655_khz() -> bytes:
    """Within the seconds that are allowed, but 19 billion samples."""
    num_frames = 59 * 60 * 655_350 // 65_535
    return flac_header(655_350, 8) + flac_silence(8) * num_frames


def flac_of_59_minutes(num_frames_less: int = 0) -> bytes:
    """Legal: nearly the longest song that the server takes."""
    num_frames = 59 * 60 * 48_000 // 65_535
    return flac_header(48_000) + flac_silence() * (num_frames - num_frames_less)


def opus_packets(frame_ms: int = 60) -> list[bytes]:
    """Ten seconds of near-silence as libopus packets."""
    quiet = np.random.default_rng(0).uniform(-1e-5, 1e-5, (1, 480_000))
    file = io.BytesIO()
    with av.open(file, "w", format="ogg") as container:
        stream: Any = container.add_stream(
            "libopus", rate=48_000, options={"frame_duration": str(frame_ms), "dtx": "1"}
        )
        stream.layout, stream.format, stream.bit_rate = "mono", "flt", 6_000
        frame = av.AudioFrame.from_ndarray(quiet.astype(np.float32), "flt", "mono")
        frame.sample_rate = 48_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with av.open(io.BytesIO(file.getvalue()), "r") as readable:
        return [bytes(packet) for packet in readable.demux() if packet.size]


def ogg_page(packets: list[bytes], *, kind: int = 0, serial: int = 1, number: int = 0) -> bytes:
    """A page of whole packets shorter than 255 bytes (RFC 3533), at any one position."""
    head = b"OggS\0" + struct.pack("<BqII", kind, 0 if kind else 2**40, serial, number)
    body = bytes([len(packets), *map(len, packets)]) + b"".join(packets)
    checksum = crc(head + bytes(4) + body, 32, 0x04C11DB7)
    return head + struct.pack("<I", checksum) + body


def opus_head(
    num_channels: int = 1, rate: int = 48_000, family: int = 0, mapping: bytes = b""
) -> bytes:
    return b"OpusHead" + struct.pack("<BBHIhB", 1, num_channels, 0, rate, 0, family) + mapping


def opus_start(head: bytes = b"", serial: int = 1) -> bytes:
    tags = b"OpusTags" + struct.pack("<II", 0, 0)
    return ogg_page([head or opus_head()], kind=2, serial=serial) + ogg_page([tags], serial=serial)


def opus_of_days() -> bytes:
    return opus_start() + repeated(ogg_page(opus_packets()[:150]))


def opus_of_empty_frames() -> bytes:
    """Packets of one byte, 60 ms each: 12 million of them."""
    return opus_start() + repeated(ogg_page([b"\x18"] * 255))


def mp3_of_hours() -> bytes:
    silence = encode(np.zeros((1, 80_000)), "mp3", rate=8_000)
    return repeated(silence)


def wav_of_hours() -> bytes:
    """A thousand samples a second are the fewest that are allowed: 25 MB would be 14 hours."""
    return wav_header(MAX_UPLOAD_BYTES, rate=1_000, num_channels=1, bits=8) + repeated(b"\x80")


def wide_wav() -> bytes:
    """Legal: a second of it has 25 million samples."""
    return wav_header(MAX_UPLOAD_BYTES, rate=768_000, num_channels=32) + bytes(MAX_UPLOAD_BYTES)


def mka_whose_packets_are_zipped() -> bytes:
    """Matroska packs PCM with zlib: 10 MB of silence in each block of 10 kB."""
    packed = zlib.compress(bytes(9_500_000), 9)
    encoding = ebml(0x5034, ebml(0x4254, b""))
    track = pcm_track(ebml(0x6D80, ebml(0x6240, encoding)))
    return mka(track, simple_block(packed) * 20)


# Headers that lie


def forged_wav(rate: int, num_channels: int = 2, bits: int = 16) -> bytes:
    header = wav_header(64_000, rate=rate & 0xFFFFFFFF, num_channels=num_channels, bits=bits)
    return header + song_file("wav-16")[44 : 44 + 64_000]


def wav_that_claims_4_gb() -> bytes:
    return wav_header(0xFFFFFFFF) + song_file("wav-16")[44:]


def wav_that_claims_half() -> bytes:
    """What stands behind a chunk's end is another chunk, so this is a song of one second."""
    return wav_header(44_100 * 4) + song_file("wav-16")[44:]


def rf64_that_claims_exabytes() -> bytes:
    return patched(song_file("rf64"), b"ds64", 8, struct.pack("<QQQ", *[2**62] * 3))


def w64_that_claims_exabytes() -> bytes:
    return patched(song_file("w64"), b"data\xf3\xac", 16, struct.pack("<Q", 2**62))


def forged_flac(rate: int = 44_100, num_channels: int = 2, num_samples: int = 0) -> bytes:
    """A FLAC of three frames whose frame headers leave the rate to the forged start."""
    return flac_header(rate, num_channels, num_samples) + flac_silence(num_channels) * 3


def forged_aiff(frames: int = 88_200, rate: bytes = b"\x40\x0e\xac\x44" + bytes(6)) -> bytes:
    """AIFF's COMM chunk: channels, frames, bits, and the rate as an 80-bit float."""
    aiff = patched(song_file("aiff"), b"COMM", 10, struct.pack(">I", frames))
    return patched(aiff, b"COMM", 16, rate)


def au_that_claims_4_gb() -> bytes:
    return patched(song_file("au"), b".snd", 8, b"\xff\xff\xff\xff")


def forged_caf_table() -> bytes:
    """A packet table of 2^60 packets."""
    head = b"caff\0\1\0\0" + b"desc" + struct.pack(">Q", 32)
    head += struct.pack(">d4sIIIII", 44_100.0, b"alac", 0, 0, 4096, 2, 0)
    table = b"pakt" + struct.pack(">QQQII", 24 + 1000, 2**60, 2**60, 0, 0) + bytes(1000)
    return head + table + b"data" + struct.pack(">QI", 2**60, 0) + bytes(10_000)


def forged_tta() -> bytes:
    return b"TTA1" + struct.pack("<HHHIII", 1, 2, 16, 44_100, 0xFFFFFFF0, 0) + bytes(100_000)


def forged_ape() -> bytes:
    """Monkey's Audio: 2^31 frames of 2^31 blocks."""
    descriptor = b"MAC " + struct.pack("<HHIIIIIII", 3990, 0, 52, 24, 4000, 0, 10**6, 0, 0)
    header = struct.pack("<HHIIIHHI", 2000, 0, 2**31, 2**31, 2**31 - 1, 16, 2, 44_100)
    return descriptor + bytes(16) + header + bytes(100_000)


def forged_alac(frame_samples: int) -> bytes:
    """An Apple Lossless cookie that asks for so many samples a frame."""
    cookie = song_file("alac").index(b"alac", song_file("alac").index(b"alac") + 4)
    data = song_file("alac")
    return data[: cookie + 8] + struct.pack(">I", frame_samples) + data[cookie + 12 :]


def forged_wavpack() -> bytes:
    """A block that claims two billion samples."""
    return patched(song_file("wavpack"), b"wvpk", 20, struct.pack("<I", 2**31 - 1))


def forged_asf() -> bytes:
    """Packets of 4 GB, by the file properties object's last three fields but one."""
    guid = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
    return patched(song_file("wma"), guid, 92, struct.pack("<II", 2**32 - 1, 2**32 - 1))


def forged_mp4(box: bytes, offset: int, new: bytes, name: str = "m4a") -> bytes:
    """An MP4 file with other bytes at an offset behind a box's name."""
    return patched(song_file(name), box, 4 + offset, new)


def atom(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body) + 8) + name + body


def mp4_with_boxes_in_boxes() -> bytes:
    box = b""
    for _ in range(3_000):
        box = atom(b"moov", box)
    return song_file("m4a")[:28] + box


def mp4_without_moov() -> bytes:
    return song_file("m4a").replace(b"moov", b"none")


def mp4_with_a_broken_moov() -> bytes:
    data = song_file("m4a")
    return data[: data.index(b"moov") + 300]


def mp4_of_empty_samples() -> bytes:
    """A table of five million samples, none of which has a byte."""
    table = struct.pack(">III", 0, 0, 5_000_000) + bytes(4 * 5_000_000)
    data = song_file("m4a")
    at = data.index(b"stsz") - 4
    (size,) = struct.unpack_from(">I", data, at)
    grown = data[:at] + atom(b"stsz", table) + data[at + size :]
    for box in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        at = grown.index(box) - 4
        (old,) = struct.unpack_from(">I", grown, at)
        grown = grown[:at] + struct.pack(">I", old + len(table) + 8 - size) + grown[at + 4 :]
    return grown


def mov_that_refers_to_a_file() -> bytes:
    """A data reference of type `url ` that is not "in this file"."""
    return patched(song_file("m4a"), b"url \0\0\0\1", 0, b"url \0\0\0\0")


def forged_opus(num_channels: int, rate: int = 48_000, family: int = 0) -> bytes:
    mapping = bytes([num_channels, 0, *range(num_channels)]) if family else b""
    head = opus_head(num_channels, rate, family, mapping)
    return opus_start(head[:250]) + ogg_page(opus_packets()[:50])


def forged_mp3_length(num_frames: int) -> bytes:
    """An MP3 whose Xing or Info header claims so many frames."""
    data = song_file("mp3")
    marker = b"Xing" if b"Xing" in data else b"Info"
    return patched(data, marker, 8, struct.pack(">I", num_frames))


# Containers inside containers, and cut off


def ebml(identifier: int, body: bytes, size: int | None = None) -> bytes:
    """An element of Matroska, with a size of its own choosing."""
    name = identifier.to_bytes((identifier.bit_length() + 7) // 8, "big")
    return name + b"\x01" + (len(body) if size is None else size).to_bytes(7, "big") + body


def pcm_track(more: bytes = b"", codec: bytes = b"A_PCM/INT/LIT", number: int = 1) -> bytes:
    audio = ebml(0xB5, struct.pack(">d", 44_100.0)) + ebml(0x9F, b"\2") + ebml(0x6264, b"\x10")
    return ebml(
        0xAE,
        ebml(0xD7, bytes([number]))
        + ebml(0x73C5, bytes([number]))
        + ebml(0x83, b"\2")
        + ebml(0x86, codec)
        + ebml(0xE1, audio)
        + more,
    )


def simple_block(data: bytes, flags: int = 0x80) -> bytes:
    return ebml(0xA3, b"\x81\0\0" + bytes([flags]) + data)


def mka(tracks: bytes, blocks: bytes, more: bytes = b"") -> bytes:
    head = ebml(0x1A45DFA3, ebml(0x4282, b"matroska"))
    info = ebml(0x1549A966, ebml(0x2AD7B1, (1_000_000).to_bytes(4, "big")))
    cluster = ebml(0x1F43B675, ebml(0xE7, b"\0") + blocks)
    return head + ebml(0x18538067, info + ebml(0x1654AE6B, tracks) + more + cluster)


def ogg_in_mka() -> bytes:
    """A whole Ogg file in each packet of a track that says Opus."""
    private = ebml(0x63A2, opus_head())
    return mka(pcm_track(private, b"A_OPUS"), simple_block(song_file("opus")) * 10)


def wav_in_wav() -> bytes:
    """A WAV in a WAV in a WAV …: the inner ones are only samples."""
    data = song_file("wav-16")[44:]
    for _ in range(1_000):
        data = wav_header(len(data)) + data
    return data


def mp3_behind_2000_tags() -> bytes:
    return id3_tag(1_000) * 2_000 + song_file("mp3")


def mka_with_an_element_of_exabytes() -> bytes:
    return mka(pcm_track(), ebml(0xA3, b"\x81\0\0\x80" + bytes(1_000), size=2**55))


def mka_with_deep_tags() -> bytes:
    tag = b""
    for _ in range(2_000):
        tag = ebml(0x67C8, ebml(0x45A3, b"A") + tag)
    tags = ebml(0x1254C367, ebml(0x7373, tag))
    return mka(pcm_track(), simple_block(bytes(40_000)) * 20, tags)


def mka_of_empty_frames() -> bytes:
    """Blocks whose lacing says 256 frames of no bytes."""
    return mka(pcm_track(), repeated(simple_block(b"\xff", flags=0x84), 5_000_000))


def ogg_of_empty_packets() -> bytes:
    return opus_start() + repeated(ogg_page([b""] * 255))


def truncated(name: str) -> bytes:
    data = song_file(name)
    return data[: len(data) // 2]


# Tags and pictures


def id3_of_50_mb() -> bytes:
    return id3_tag(50_000_000) + song_file("mp3")


def tag_names(count: int) -> list[bytes]:
    letters = (ascii_letters + digits).encode()
    return [bytes(name) for name in islice(product(letters, repeat=4), count)]


def id3_of_a_million_frames() -> bytes:
    """Each frame a text with a name of its own, of which FFmpeg keeps a list."""
    frames = b"".join(id3_frame(b"TXXX", b"\0" + name + b"\0x") for name in tag_names(1_000_000))
    size = bytes(len(frames) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x03\0\0" + size + frames + song_file("mp3")


def vorbis_comment_of_a_million_lines() -> bytes:
    names = tag_names(1_000_000)
    lines = b"".join(b"\6\0\0\0" + name + b"=x" for name in names)
    comment = struct.pack("<II", 0, len(names)) + lines
    return flac_header(blocks=[(4, comment)]) + flac_silence() * 3


def mka_of_300000_tags() -> bytes:
    tags = b"".join(
        ebml(0x67C8, ebml(0x45A3, name) + ebml(0x4487, b"x")) for name in tag_names(300_000)
    )
    return mka(pcm_track(), simple_block(bytes(40_000)) * 20, ebml(0x1254C367, ebml(0x7373, tags)))


def wav_of_a_million_chunks() -> bytes:
    data = song_file("wav-16")
    return data[:12] + b"junk\0\0\0\0" * 1_000_000 + data[12:]


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_of_30000_by_30000() -> bytes:
    """Seven GB of pixels, 16 bits in four channels; most rows are missing, which no one checks."""
    shape = struct.pack(">IIBBBBB", 30_000, 30_000, 16, 6, 0, 0, 0)
    rows = zlib.compress(bytes(240_001 * 40), 9)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", shape)
        + png_chunk(b"IDAT", rows)
        + png_chunk(b"IEND", b"")
    )


def mp3_with_a_huge_cover() -> bytes:
    picture = id3_frame(b"APIC", b"\0image/png\0\3\0" + png_of_30000_by_30000())
    size = bytes(len(picture) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x03\0\0" + size + picture + song_file("mp3")


def flac_with_a_huge_cover() -> bytes:
    png = png_of_30000_by_30000()
    picture = struct.pack(">II9sIIIIII", 3, 9, b"image/png", 0, 30_000, 30_000, 64, 0, len(png))
    return flac_header(blocks=[(6, picture + png)]) + flac_silence() * 3


def film(container: str) -> bytes:
    """A sound track beside ten pictures of 30,000 x 30,000, which were never encoded."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        pictures: Any = output.add_stream("png", rate=5)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 64, "rgb24"
        sound: Any = output.add_stream("libmp3lame", rate=44_100)
        sound.layout = "stereo"
        output.start_encoding()
        for index in range(10):
            picture = av.Packet(png_of_30000_by_30000())
            picture.stream, picture.pts, picture.dts = pictures, index, index
            picture.is_keyframe = True
            output.mux_one(picture)
        output.mux(sound.encode(as_frame(melody(2.0), "fltp", 44_100)))
        output.mux(sound.encode(None))
    return file.getvalue()


def mov_of_huge_pictures() -> bytes:
    return patched(film("mov"), b"png \0\0\0\0", 28, struct.pack(">HH", 30_000, 30_000))


def avi_of_huge_pictures() -> bytes:
    return patched(film("avi"), b"strf", 12, struct.pack("<II", 30_000, 30_000))


def picture_alone() -> bytes:
    return png_of_30000_by_30000()


# Streams


def mka_of_many_tracks() -> bytes:
    tracks = b"".join(pcm_track(number=number % 250 + 1) for number in range(20_000))
    return mka(tracks, simple_block(bytes(40_000)) * 20)


def ogg_of_many_streams() -> bytes:
    starts = b"".join(ogg_page([opus_head()], kind=2, serial=serial) for serial in range(1, 20_000))
    return starts + opus_start() + ogg_page(opus_packets()[:150])


def ogg_of_a_long_chain() -> bytes:
    """Ten thousand songs of a few milliseconds, one behind the other."""
    page = ogg_page(opus_packets()[:2])
    return (opus_start() + page) * 10_000


def mp4_of_many_tracks() -> bytes:
    """A movie box with five thousand copies of its track."""
    data = song_file("m4a")
    moov, trak = data.index(b"moov") - 4, data.index(b"trak") - 4
    (size,) = struct.unpack_from(">I", data, trak)
    copies = data[trak : trak + size] * 5_000
    (old,) = struct.unpack_from(">I", data, moov)
    head = struct.pack(">I", old + len(copies))
    return data[:moov] + head + data[moov + 4 : trak] + copies + data[trak:]


# Files that name other files


def playlist(text: str) -> Callable[[], bytes]:
    """A text that names a file that exists, and an address."""

    def make() -> bytes:
        names = {"file": "/usr/share/games/frozen-bubble/snd/frozen-mainzik-1p.ogg", "url": URL}
        return text.format(**names).encode()

    return make


URL = "http://127.0.0.1:9/song.mp3"
"""Stands in the playlists; nobody listens there."""

PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{file}\n#EXTINF:9,\n{url}\n"
    "#EXT-X-ENDLIST\n",
    "hls with a key": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXT-X-KEY:METHOD=AES-128,URI={url}\n"
    "#EXTINF:9,\n{file}\n",
    "m3u": "#EXTM3U\n#EXTINF:9,x\nconcat:{file}|{url}\n",
    "ffconcat": "ffconcat version 1.0\nfile '{file}'\nfile '{url}'\n",
    "concat without its line": "file '{file}'\n",
    "pls": "[playlist]\nFile1={url}\nFile2={file}\nNumberOfEntries=2\n",
    "asx": '<asx version="3.0"><entry><ref href="{url}"/></entry></asx>',
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period>'
    "<AdaptationSet><Representation><BaseURL>{url}</BaseURL></Representation></AdaptationSet>"
    "</Period></MPD>",
    "imf": '<?xml version="1.0"?><CompositionPlaylist xmlns="http://www.smpte-ra.org/schemas/2067-3/'
    '2016"><Id>urn:uuid:1</Id></CompositionPlaylist>',
    "xml with an entity": '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY y SYSTEM "file://{file}">]>'
    "<MPD>&y;</MPD>",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 9 RTP/AVP 0\n",
    "rtsp reference": "RTSPtext\r\n{url}\r\n",
    "cue": 'FILE "{file}" WAVE\n  TRACK 01 AUDIO\n    INDEX 01 00:00:00\n',
    "a name alone": "{file}",
    "a protocol alone": "concat:{file}|{file}",
    "subfile": "subfile,,start,0,end,0,,:{file}",
}

_LONG, _COMPLEX = "audio_too_long", "audio_too_complex"
_RATE, _CHANNELS = "audio_rate_out_of_range", "audio_too_many_channels"
_ONE_FRAME = 1024 / 44_100  # where forged times leave nothing else inside the edit list
_NO_AUDIO = "not_audio"
_MAX32 = b"\xff\xff\xff\xff"

BOMBS: dict[str, Bomb] = {
    # Hours in a few bytes
    "25 MB of near-silent Opus": Bomb(opus_of_days, _LONG),
    "25 MB of empty Opus frames": Bomb(opus_of_empty_frames, _LONG),
    "25 MB of silent FLAC": Bomb(flac_of_months, _LONG),
    "FLAC of 19 billion samples": Bomb(flac_of_59_minutes_of_eight_channels_at_655_khz, _COMPLEX),
    "FLAC of 59 minutes": Bomb(flac_of_59_minutes, seconds=3538.9),
    "25 MB of MP3 of 8 kbit": Bomb(mp3_of_hours, _LONG),
    "25 MB of WAV at 1 kHz": Bomb(wav_of_hours, _LONG),
    "25 MB of WAV of 32 channels at 768 kHz": Bomb(
        wide_wav, seconds=MAX_UPLOAD_BYTES / 64 / 768_000
    ),
    "Matroska with zipped packets": Bomb(
        mka_whose_packets_are_zipped, seconds=20 * 9_500_000 / 4 / 44_100
    ),
    # Headers that lie
    "WAV of 0 Hz": Bomb(lambda: forged_wav(0), _NO_AUDIO),
    "WAV of 1 Hz": Bomb(lambda: forged_wav(1), _RATE),
    "WAV of 768 kHz": Bomb(lambda: forged_wav(768_000), seconds=16_000 / 768_000),
    "WAV of 2 GHz": Bomb(lambda: forged_wav(2**31 - 1), _RATE),
    "WAV of 4 GHz": Bomb(lambda: forged_wav(2**32 - 1), _NO_AUDIO),
    "WAV of 32 channels at 768 kHz": Bomb(lambda: forged_wav(768_000, 32), seconds=1_000 / 768_000),
    "WAV of no channels": Bomb(lambda: forged_wav(44_100, 0), _NO_AUDIO),
    "WAV of 65535 channels": Bomb(lambda: forged_wav(44_100, 65_535), _NO_AUDIO),
    "WAV of 33 channels": Bomb(lambda: forged_wav(44_100, 33), _CHANNELS),
    "WAV of 65535 bits": Bomb(lambda: forged_wav(44_100, 2, 65_535), _NO_AUDIO),
    "WAV that claims 4 GB": Bomb(wav_that_claims_4_gb, seconds=2),
    "WAV that claims half": Bomb(wav_that_claims_half, seconds=1),
    "RF64 that claims exabytes": Bomb(rf64_that_claims_exabytes, seconds=2),
    "W64 that claims exabytes": Bomb(w64_that_claims_exabytes, seconds=2),
    "FLAC of 0 Hz": Bomb(lambda: forged_flac(0), _NO_AUDIO),
    "FLAC of 1 Hz": Bomb(lambda: forged_flac(1), _RATE),
    "FLAC of 1 MHz": Bomb(lambda: forged_flac(2**20 - 1), _RATE),
    "FLAC that claims too many samples": Bomb(
        lambda: forged_flac(num_samples=2**36 - 1), seconds=3 * 65_535 / 44_100
    ),
    "FLAC that claims one sample": Bomb(
        lambda: forged_flac(num_samples=1), seconds=3 * 65_535 / 44_100
    ),
    "AIFF of 2 billion frames": Bomb(lambda: forged_aiff(2**31 - 1), seconds=2),
    "AIFF of 4 billion frames": Bomb(lambda: forged_aiff(2**32 - 1), _NO_AUDIO),
    "AIFF of no rate": Bomb(lambda: forged_aiff(rate=bytes(10)), _NO_AUDIO),
    "AIFF of an infinite rate": Bomb(
        lambda: forged_aiff(rate=b"\x7f\xff\x80" + bytes(7)), _NO_AUDIO
    ),
    "AU that claims 4 GB": Bomb(au_that_claims_4_gb, seconds=2),
    "CAF with a table of 2^60 packets": Bomb(forged_caf_table, _NO_AUDIO),
    "TTA of 4 billion samples": Bomb(forged_tta, _NO_AUDIO),
    "APE of 2^62 samples": Bomb(forged_ape, _NO_AUDIO),
    "ALAC of frames of 16 million samples": Bomb(lambda: forged_alac(2**24), _NO_AUDIO),
    "ALAC of frames of 2 billion samples": Bomb(lambda: forged_alac(2**31 - 1), _NO_AUDIO),
    "WavPack of 2 billion samples": Bomb(forged_wavpack, seconds=1.5),
    "ASF of packets of 4 GB": Bomb(forged_asf, _NO_AUDIO),
    "MP3 that claims 4 billion frames": Bomb(lambda: forged_mp3_length(2**32 - 1), seconds=2),
    "MP3 that claims one frame": Bomb(lambda: forged_mp3_length(1), seconds=2),
    "Opus of no channels": Bomb(lambda: forged_opus(0), _NO_AUDIO),
    "Opus of 230 channels": Bomb(lambda: forged_opus(230, family=255), _NO_AUDIO),
    "Opus that says 0 Hz": Bomb(lambda: forged_opus(1, rate=0), seconds=3),
    "Opus that says 1 Hz": Bomb(lambda: forged_opus(1, rate=1), seconds=3),
    "Opus that says 4 GHz": Bomb(lambda: forged_opus(1, rate=2**32 - 1), seconds=3),
    "Opus of ambient sound": Bomb(lambda: forged_opus(4, family=2), _NO_AUDIO),
    "Opus of eight channels in no order": Bomb(lambda: forged_opus(8, family=255), _NO_AUDIO),
    # MP4
    "MP4 that claims 100 days": Bomb(
        lambda: forged_mp4(b"mvhd", 16, struct.pack(">I", 2**31)), seconds=2
    ),
    "MP4 that claims no time": Bomb(lambda: forged_mp4(b"mvhd", 16, bytes(4)), seconds=2),
    "MP4 of 4 billion sample times": Bomb(lambda: forged_mp4(b"stts", 4, _MAX32), _COMPLEX),
    "MP4 of one sample time for 4 billion": Bomb(
        lambda: forged_mp4(b"stts", 8, _MAX32 + _MAX32), seconds=_ONE_FRAME
    ),
    "MP4 of 4 billion sample sizes": Bomb(lambda: forged_mp4(b"stsz", 8, _MAX32), _NO_AUDIO),
    "MP4 of 4 billion equal samples": Bomb(
        lambda: forged_mp4(b"stsz", 4, b"\0\0\0\1" + _MAX32), _NO_AUDIO
    ),
    "MP4 of 4 billion chunks": Bomb(lambda: forged_mp4(b"stco", 4, _MAX32), seconds=2),
    "MP4 of 4 billion samples a chunk": Bomb(lambda: forged_mp4(b"stsc", 12, _MAX32), _NO_AUDIO),
    "MP4 of no time scale": Bomb(lambda: forged_mp4(b"mdhd", 12, bytes(4)), seconds=_ONE_FRAME),
    "MP4 of 4 billion descriptions": Bomb(lambda: forged_mp4(b"stsd", 4, _MAX32), _NO_AUDIO),
    "MP4 of empty samples": Bomb(mp4_of_empty_samples, _NO_AUDIO),
    "MP4 of 5000 tracks": Bomb(mp4_of_many_tracks, _COMPLEX),
    "MP4 of boxes in boxes": Bomb(mp4_with_boxes_in_boxes, _NO_AUDIO),
    "MP4 without moov": Bomb(mp4_without_moov, _NO_AUDIO),
    "MP4 with a broken moov": Bomb(mp4_with_a_broken_moov, _NO_AUDIO),
    "MP4 that refers to another file": Bomb(mov_that_refers_to_a_file, seconds=2),
    "half an MP4": Bomb(lambda: truncated("m4a"), _NO_AUDIO),
    # Containers
    "Ogg in Matroska": Bomb(ogg_in_mka, _NO_AUDIO),
    "WAV in WAV a thousand times": Bomb(wav_in_wav, seconds=2 + 999 * 11 / 44_100),
    "2000 ID3 tags": Bomb(mp3_behind_2000_tags, _COMPLEX),
    "Matroska with an element of exabytes": Bomb(mka_with_an_element_of_exabytes, _NO_AUDIO),
    "Matroska with deep tags": Bomb(mka_with_deep_tags, seconds=20 * 10_000 / 44_100),
    "Matroska of empty frames": Bomb(mka_of_empty_frames, _NO_AUDIO),
    "Matroska of 20000 tracks": Bomb(mka_of_many_tracks, seconds=20 * 10_000 / 44_100),
    "25 MB of empty Ogg packets": Bomb(ogg_of_empty_packets, _NO_AUDIO),
    "Ogg of 20000 streams": Bomb(ogg_of_many_streams, _COMPLEX),
    "Ogg of 10000 songs in a row": Bomb(ogg_of_a_long_chain, seconds=1200),
    "half an Ogg": Bomb(lambda: truncated("opus"), seconds=1),
    "half a Matroska": Bomb(lambda: truncated("mka-flac"), seconds=1),
    # Tags and pictures
    "ID3 tag of 50 MB": Bomb(id3_of_50_mb, seconds=2),
    "ID3 tag of a million frames": Bomb(id3_of_a_million_frames, _COMPLEX),
    "FLAC with a million comments": Bomb(vorbis_comment_of_a_million_lines, _COMPLEX),
    "Matroska of 300000 tags": Bomb(mka_of_300000_tags, _COMPLEX),
    "WAV of a million chunks": Bomb(wav_of_a_million_chunks, seconds=2),
    "MP3 with a cover of 30000 x 30000": Bomb(mp3_with_a_huge_cover, seconds=2),
    "FLAC with a cover of 30000 x 30000": Bomb(flac_with_a_huge_cover, seconds=3 * 65_535 / 44_100),
    "MOV of 30000 x 30000": Bomb(mov_of_huge_pictures, seconds=2),
    "AVI of 30000 x 30000": Bomb(avi_of_huge_pictures, seconds=2),
    "PNG of 30000 x 30000": Bomb(picture_alone, _NO_AUDIO),
    **{f"playlist: {name}": Bomb(playlist(text), _NO_AUDIO) for name, text in PLAYLISTS.items()},
}
