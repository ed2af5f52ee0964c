"""Transparency-log proofs that a third party can verify: RFC 6962 trees, tiles, and signed checkpoints. Pure."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.security.proofs.history_counts import HISTORY_HEAD, HistoryCounts, history_leaf, history_salt
    from forebay.cluster.security.proofs.leaves import (
        LEAF_BYTES,
        SALT_BYTES,
        Leaf,
        LeafError,
        command_leaf,
        command_path,
        command_salt,
        entry_salt,
        leaf_of,
        parse_leaf,
    )
    from forebay.cluster.security.proofs.notes import (
        COSIGNATURE_KEY,
        MAX_NOTE_BYTES,
        NOTE_KEY,
        Checkpoint,
        NoteError,
        Signature,
        UnsignedNoteError,
        VerifiedSignature,
        VerifierKey,
        cosign,
        parse_checkpoint,
        parse_key,
        parse_note,
        sign,
        verifier_of,
        verify_note,
        write_note,
    )
    from forebay.cluster.security.proofs.tiles import (
        Tile,
        TileError,
        bundle,
        leaves_in,
        new_tiles,
        nodes_in_tiles,
        parse_path,
        tile_at,
    )
    from forebay.cluster.security.proofs.tree import (
        EMPTY_ROOT,
        HASH_BYTES,
        ProofError,
        RightEdge,
        consistency_proof,
        inclusion_proof,
        leaf_hash,
        node_hash,
        root_of,
        verify_consistency,
        verify_inclusion,
    )
    from forebay.cluster.security.proofs.witness_protocol import (
        MAX_ANSWER_BYTES,
        MAX_PROOF_HASHES,
        MAX_REQUEST_BYTES,
        SIZE_TYPE,
        AddCheckpoint,
        WitnessRequestError,
        cosignature_in,
        parse_request,
        parse_signer,
        parse_size,
        write_signer,
    )
else:
    __getattr__ = export_lazily(__name__)
