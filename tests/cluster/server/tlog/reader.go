// Reads a log as somebody else would: with Go's own sumdb packages (note, tlog), which know nothing of Forebay.
//
// usage: reader DIRECTORY LEAST. In the directory: keys (a vkey on each line), old and checkpoint (signed notes), and
// tile/..., as C2SP tlog-tiles names them. Both notes must have LEAST signatures by keys of logs; every leaf must be
// in the tree, and the tree must go on from the old one. Prints one line of figures, or what is wrong (exit code 1).
package main

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"sumdb/note"
	"sumdb/tlog"
)

const height = 8

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func holds(condition bool, format string, arguments ...any) {
	if !condition {
		check(fmt.Errorf(format, arguments...))
	}
}

// A witness's key: cosignature/v1, which sumdb/note leaves to others.
type cosigner struct {
	name   string
	id     uint32
	public ed25519.PublicKey
}

func (one *cosigner) Name() string    { return one.name }
func (one *cosigner) KeyHash() uint32 { return one.id }
func (one *cosigner) Verify(text, signature []byte) bool {
	if len(signature) != 8+ed25519.SignatureSize {
		return false
	}
	head := fmt.Sprintf("cosignature/v1\ntime %d\n", binary.BigEndian.Uint64(signature))
	return ed25519.Verify(one.public, append([]byte(head), text...), signature[8:])
}

type verifiers struct {
	list    note.Verifiers
	witness map[uint32]bool
}

func readKeys(path string) verifiers {
	held, err := os.ReadFile(path)
	check(err)
	var list []note.Verifier
	witness := map[uint32]bool{}
	for _, line := range strings.Split(string(held), "\n") {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if verifier, err := note.NewVerifier(line); err == nil {
			list = append(list, verifier)
			continue
		}
		parts := strings.SplitN(line, "+", 3)
		holds(len(parts) == 3, "%s is no key", line)
		id, err := strconv.ParseUint(parts[1], 16, 32)
		check(err)
		key, err := base64.StdEncoding.DecodeString(parts[2])
		check(err)
		holds(len(key) == 33 && key[0] == 4, "%s is no key of a witness", line)
		list = append(list, &cosigner{parts[0], uint32(id), key[1:]})
		witness[uint32(id)] = true
	}
	return verifiers{note.VerifierList(list...), witness}
}

func readCheckpoint(path string, keys verifiers, least int) (tree tlog.Tree, signed, cosigned int) {
	held, err := os.ReadFile(path)
	check(err)
	opened, err := note.Open(held, keys.list)
	check(err)
	for _, one := range opened.Sigs {
		if keys.witness[one.Hash] {
			cosigned++
		} else {
			signed++
		}
	}
	holds(signed >= least, "%s: %d have signed it, and %d are wanted", path, signed, least)
	holds(len(opened.UnverifiedSigs) == 0, "%s: %d signatures are of nobody", path, len(opened.UnverifiedSigs))
	lines := strings.Split(opened.Text, "\n")
	holds(len(lines) == 4 && lines[3] == "", "%s: it is no checkpoint", path)
	tree.N, err = strconv.ParseInt(lines[1], 10, 64)
	check(err)
	root, err := base64.StdEncoding.DecodeString(lines[2])
	check(err)
	holds(len(root) == tlog.HashSize, "%s: its root is no hash", path)
	copy(tree.Hash[:], root)
	return
}

type files string

func (directory files) Height() int                                { return height }
func (directory files) SaveTiles(tiles []tlog.Tile, data [][]byte) {}
func (directory files) ReadTiles(tiles []tlog.Tile) ([][]byte, error) {
	var found [][]byte
	for _, tile := range tiles {
		held, err := os.ReadFile(directory.path(tile))
		if err != nil {
			return nil, err
		}
		found = append(found, held)
	}
	return found, nil
}

// sumdb's paths have the height of tiles in them, which tlog-tiles fixes; and `data` for what it calls `entries`.
func (directory files) path(tile tlog.Tile) string {
	path := strings.Replace(tile.Path(), fmt.Sprintf("tile/%d/", height), "tile/", 1)
	return filepath.Join(string(directory), strings.Replace(path, "tile/data/", "tile/entries/", 1))
}

func (directory files) leaves(number int64, width int) [][]byte {
	held, err := os.ReadFile(directory.path(tlog.Tile{H: height, L: -1, N: number, W: width}))
	check(err)
	var found [][]byte
	for reader := bytes.NewReader(held); reader.Len() > 0; {
		var size uint16
		check(binary.Read(reader, binary.BigEndian, &size))
		leaf := make([]byte, size)
		count, err := reader.Read(leaf)
		check(err)
		holds(count == int(size), "bundle %d is cut", number)
		found = append(found, leaf)
	}
	holds(len(found) == width, "bundle %d has %d leaves, not %d", number, len(found), width)
	return found
}

func main() {
	directory := files(os.Args[1])
	least, err := strconv.Atoi(os.Args[2])
	check(err)
	keys := readKeys(filepath.Join(os.Args[1], "keys"))
	old, _, _ := readCheckpoint(filepath.Join(os.Args[1], "old"), keys, least)
	tree, signed, cosigned := readCheckpoint(filepath.Join(os.Args[1], "checkpoint"), keys, least)
	reader := tlog.TileHashReader(tree, directory)

	root, err := tlog.TreeHash(tree.N, reader)
	check(err)
	holds(root == tree.Hash, "the tiles have another root than the checkpoint")
	grown, err := tlog.ProveTree(tree.N, old.N, reader)
	check(err)
	check(tlog.CheckTree(grown, tree.N, tree.Hash, old.N, old.Hash))
	for first := int64(0); first < tree.N; first += 1 << height {
		width := int64(1 << height)
		if width > tree.N-first {
			width = tree.N - first
		}
		// All of a small log; of a large one the leaves at the edges of each bundle.
		leaves := directory.leaves(first>>height, int(width))
		for position, leaf := range leaves {
			if tree.N > 1000 && position > 0 && position < len(leaves)-1 {
				continue
			}
			at := first + int64(position)
			proof, err := tlog.ProveRecord(tree.N, at, reader)
			check(err)
			check(tlog.CheckRecord(proof, tree.N, tree.Hash, at, tlog.RecordHash(leaf)))
		}
	}
	fmt.Printf("%d leaves go on from %d, signed %d, cosigned %d\n", tree.N, old.N, signed, cosigned)
}
