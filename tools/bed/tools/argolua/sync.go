package main

import (
	"encoding/json"
	"fmt"
	"os"
	"time"

	appv1 "github.com/argoproj/argo-cd/v3/pkg/apis/application/v1alpha1"
	"github.com/argoproj/argo-cd/v3/util/lua"
	"github.com/argoproj/gitops-engine/pkg/cache"
	"github.com/argoproj/gitops-engine/pkg/sync"
	"github.com/argoproj/gitops-engine/pkg/sync/common"
	"github.com/argoproj/gitops-engine/pkg/utils/kube"
	"github.com/argoproj/gitops-engine/pkg/utils/tracing"
	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Objects that have this label with the name of the application are its own: what Git has no more is pruned.
const label = "app.kubernetes.io/instance"

type syncQuestion struct {
	Kubeconfig  string            `json:"kubeconfig"`
	Namespace   string            `json:"namespace"`
	Application string            `json:"application"`
	Health      string            `json:"health"`
	Seconds     int               `json:"seconds"`
	Objects     []json.RawMessage `json:"objects"`
}

type syncResult struct {
	Name    string `json:"name"`
	Status  string `json:"status"`
	Phase   string `json:"phase"`
	Message string `json:"message"`
}

// syncOnce makes a namespace what Git has, wave by wave, as Argo CD's application controller does: by the same
// engine, with the health that the script says.
func syncOnce() error {
	var asked syncQuestion
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", asked.Kubeconfig)
	if err != nil {
		return err
	}
	objects := make([]*unstructured.Unstructured, 0, len(asked.Objects))
	overrides := lua.ResourceHealthOverrides{}
	for number, raw := range asked.Objects {
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(raw); err != nil {
			return fmt.Errorf("object %d: %w", number, err)
		}
		objects = append(objects, object)
		key := lua.GetConfigMapKey(object.GroupVersionKind())
		overrides[key] = appv1.ResourceOverride{HealthLua: asked.Health}
	}

	live := cache.NewClusterCache(config,
		cache.SetNamespaces([]string{asked.Namespace}),
		cache.SetLogr(logr.Discard()),
		cache.SetPopulateResourceInfoHandler(
			func(object *unstructured.Unstructured, _ bool) (any, bool) {
				isOurs := object.GetLabels()[label] == asked.Application
				return isOurs, isOurs
			}),
	)
	if err := live.EnsureSynced(); err != nil {
		return err
	}
	defer live.Invalidate()

	found, err := syncToTheEnd(asked, config, live, objects, overrides)
	if err != nil {
		return err
	}

	results := make([]syncResult, 0, len(found))
	for _, one := range found {
		results = append(results, syncResult{
			one.ResourceKey.Name, string(one.Status), string(one.HookPhase), one.Message})
	}
	return json.NewEncoder(os.Stdout).Encode(results)
}

// syncToTheEnd syncs until the last wave is over. Each pass has live objects of its own and the state of the pass
// before, as in Argo CD's application controller: the engine's own loop keeps the live objects of its first pass, in
// which an object that it creates is missing for ever.
func syncToTheEnd(
	asked syncQuestion,
	config *rest.Config,
	live cache.ClusterCache,
	objects []*unstructured.Unstructured,
	overrides lua.ResourceHealthOverrides,
) ([]common.ResourceSyncResult, error) {
	kubectl := &kube.KubectlCmd{Log: logr.Discard(), Tracer: tracing.NopTracer{}}
	isOurs := func(resource *cache.Resource) bool {
		is, _ := resource.Info.(bool)
		return is
	}
	var phase common.OperationPhase = common.OperationRunning
	var message string
	var found []common.ResourceSyncResult
	begun := metav1.Now()
	for time.Since(begun.Time) < time.Duration(asked.Seconds)*time.Second {
		managed, err := live.GetManagedLiveObjs(objects, isOurs)
		if err != nil {
			return nil, err
		}
		reconciled := sync.Reconcile(objects, managed, asked.Namespace, live)
		pass, cleanup, err := sync.NewSyncContext(
			"revision", reconciled, config, config, kubectl, asked.Namespace, live.GetOpenAPISchema(),
			sync.WithInitialState(phase, message, found, begun),
			sync.WithLogr(logr.Discard()),
			sync.WithHealthOverride(overrides),
			sync.WithPrune(true),
			sync.WithServerSideApply(true),
			sync.WithServerSideApplyManager("argocd-controller"),
		)
		if err != nil {
			return nil, err
		}
		pass.Sync()
		phase, message, found = pass.GetState()
		cleanup()
		if phase.Completed() {
			if phase != common.OperationSucceeded {
				return nil, fmt.Errorf("the sync ended as %s: %s", phase, message)
			}
			return found, nil
		}
		time.Sleep(time.Second)
	}
	return nil, fmt.Errorf("the sync was not over after %d s: %s", asked.Seconds, message)
}
